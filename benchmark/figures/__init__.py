"""The figures of two papers, made from this project's replay: pictures, their numbers and a page that compares.

    Marconi    Prefix Caching for the Era of Hybrid LLMs, arXiv 2411.19379: 3a to 13b, table 1
    T-LRU      Tail-Optimized Caching for LLM Inference, arXiv 2510.15152: tables 1 to 3, the variants of its figure 6

A figure (`base.py`) says which replays it needs; `measure.py` does those of all figures, each once, in processes;
figures then turn them into numbers, `canvas.py` draws these, and `page.py` writes what is said of them. Only the canvas
imports matplotlib (`make figures` installs it). `catalog.py` lists them, one file holds one or those of one
kind.
"""

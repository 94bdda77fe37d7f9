"""Where a worker finds the chat template of a folder.

    --chat-template FILE.jinja
    chat_template.jinja
    chat_template.json                      only where the folder has a processor (a model that also sees or hears)
    tokenizer_config.json: chat_template    one, or several by name: the one asked for, else the first

Models for which SGLang has templates or encoders in Python are refused: there is no template to render.

Sources: `srt/parser/template_manager.py`, `srt/entrypoints/openai/chat_encoding.py`, `srt/parser/conversation.py`;
transformers 5.19 `tokenization_utils_base.py:_from_pretrained`.
"""

from pathlib import Path
from typing import Any, Final

from marconi.router.prompts.files import ModelFolder

_PYTHON_ENCODERS: Final = ("DeepseekV4", "KimiK3", "InklingForConditionalGeneration", "MossVL")
_PYTHON_TEMPLATES: Final = frozenset({"GlmMoeDsaForCausalLM", "Glm5NextForConditionalGeneration"})
_NAMED_TEMPLATES: Final = frozenset(
    (
        *("internvl_chat", "deepseek_vl_v2", "multi_modality", "phi4mm", "minicpmv", "minicpmo", "moss_vl"),
        *("deepseek-ocr", "unlimited-ocr", "paddleocr_vl", "whisper", "minimax_m3_vl", "deepseek_v41"),
    )
)


def template_source(folder: ModelFolder, file: Path | None = None, name: str | None = None) -> str | None:
    """The template's text; None for a model without one. `ValueError` where a worker renders by other means.

    `file` is what `--chat-template` names, `name` what `--hf-chat-template-name` names.
    """
    if file is not None:
        return _of_file(file)
    _require_template(folder)
    found = _found(folder)
    if isinstance(found, str) or found is None:
        return found
    if name is None:
        return next(iter(found.values()), None)
    if name not in found:
        raise ValueError(f"{folder.path}: no chat template {name!r}; there are {', '.join(sorted(found))}")
    return found[name]


def _of_file(file: Path) -> str:
    if file.suffix != ".jinja":
        raise ValueError(f"{file}: SGLang's own templates are not rendered here; a .jinja file is right")
    try:
        return file.read_text(encoding="utf-8").strip("\n").replace("\\n", "\n")
    except OSError as error:
        raise ValueError(f"{file}: no chat template ({error.strerror})") from None


def _require_template(folder: ModelFolder) -> None:
    config = folder.json("config.json")
    architecture = next(iter(config.get("architectures") or ()), "")
    kind = config.get("model_type")
    by_python = architecture in _PYTHON_TEMPLATES or any(part in architecture for part in _PYTHON_ENCODERS)
    if by_python or kind in _NAMED_TEMPLATES or ("DeepseekV3" in architecture and _found(folder) is None):
        raise ValueError(f"{folder.path}: chats of {architecture or kind} are encoded by Python code of SGLang")


def _found(folder: ModelFolder) -> str | dict[str, str] | None:
    if folder.has("chat_template.jinja"):
        return folder.text("chat_template.jinja")
    if (folder.path / "additional_chat_templates").is_dir():
        raise ValueError(f"{folder.path}: additional_chat_templates without a chat_template.jinja, in no order")
    if folder.has("preprocessor_config.json") or folder.has("processor_config.json"):
        found = _given(folder.json("chat_template.json").get("chat_template"))
        if found is not None:
            return found
    return _given(folder.json("tokenizer_config.json").get("chat_template"))


def _given(value: Any) -> str | dict[str, str] | None:
    if isinstance(value, list):
        return {each["name"]: each["template"] for each in value}
    return value if isinstance(value, str | dict) else None

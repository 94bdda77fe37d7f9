"""A trace over a fleet of simulated workers behind the router's own brain.

    trace --> Dispatcher --> worker: a queue, a prefill after the other, decoding beside, a prefix cache of its own
                  ^             |
               Fleet <--- its events, `event_delay_s` later

Everything that decides is what a live router runs: `router.dispatch.Dispatcher` with a rule of `router.routing`,
`router.sync.Fleet` and `router.index.FleetIndex`, by the same records of events in numbered batches. Each worker's
cache is the one that a replay of one worker drives. Only the tokens' way is simulated: queues, times and the delay of
events. So this package stands above both `replay` and `router`, which know nothing of each other.

    variants     a rule by its name, and what a request's key is
    hashes       hashes of the positions of a trace's prompts
    tree_events  the changes of a tree, as events
    worker       one worker
    simulation   the clock
    task         one simulation, described by values, and what it gives
    result, report, command
"""

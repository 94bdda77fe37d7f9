"""A simulated fleet: a trace over workers behind the live router's own dispatcher.

    trace --> Dispatcher --> worker: a queue, a prefill after the other, decoding beside, a prefix cache of its own
                  ^             |
               Fleet <--- its events, `event_delay_s` later

Everything that decides is the live router's: `router.dispatch.Dispatcher` with a rule of `router.routing`,
`router.sync.Fleet` and `router.index.FleetIndex`, fed with the same events in numbered batches. Each worker's cache is
the one that a replay of one worker drives. Queues, times and the delay of events are simulated. So this package stands
above both `replay` and `router`, which know nothing of each other.

    variants     a rule by its name, and what a request's key is
    tree_events  the changes of a tree, as events
    worker       one worker
    simulation   the clock
    task         one simulation, described by values, and its result
    result       the results as JSON and tables
    command      `marconi replay --replicas`
"""

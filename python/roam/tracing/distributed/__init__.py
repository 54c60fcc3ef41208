"""Steps of several processes in a trace: collectives, `DistributedDataParallel`, `DTensor` and
`fully_shard`.
"""

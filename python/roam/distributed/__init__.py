"""Steps of several processes: collectives of `torch.distributed` as calls of a program."""

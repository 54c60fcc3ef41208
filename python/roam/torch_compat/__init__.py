"""PyTorch's private side: what roam uses and changes of it."""

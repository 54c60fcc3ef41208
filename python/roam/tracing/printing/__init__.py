"""What a step prints and logs."""

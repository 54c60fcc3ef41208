"""What operators return on fake tensors: shapes, strides, and which results share memory."""

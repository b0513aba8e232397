"""Memory: `states` are weights, gradients and optimizer, `activations` what backward needs."""

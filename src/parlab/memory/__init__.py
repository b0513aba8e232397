"""Memory: model states, what ZeRO sends, activations, and all of a training step together."""

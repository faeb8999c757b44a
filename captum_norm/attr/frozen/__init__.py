"""The network with its attention, norms and activations frozen, in which it is linear; and what follows from that."""

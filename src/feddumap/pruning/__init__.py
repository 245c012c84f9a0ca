"""FedAP: a pruning rate from the curvature of each node's loss, and filters removed for good."""

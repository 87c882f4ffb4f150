"""From rollouts to a parameter update."""

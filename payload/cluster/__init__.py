"""Day two on any Kubernetes: submit, watch, delete, scale, replace nodes; through kubectl and its contexts."""

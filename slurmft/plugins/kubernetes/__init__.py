"""Jobs on Kubernetes: manifests, and the task of a pod."""

"""Scripts that attach through their training library: callbacks for Trainer and Lightning."""

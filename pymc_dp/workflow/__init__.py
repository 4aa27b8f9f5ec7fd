"""What a statistician does around a run: rehearse it, check the model, compare it with others."""

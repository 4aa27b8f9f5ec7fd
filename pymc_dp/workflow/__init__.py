"""What a statistician does around a run: rehearse it before any of the budget is spent."""

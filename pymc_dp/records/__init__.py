"""The proof that records are separate: from a model to a graph of its rows, or a refusal."""

"""Private preparation: coordinates, clip norms and anchors, learned from charged releases."""

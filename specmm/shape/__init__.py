"""Draft trees: their shapes, how they are drawn, and how a shape is chosen."""

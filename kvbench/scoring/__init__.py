"""From a model's text to a score: boxes, equality of mathematics, processes that cannot hang. No torch."""

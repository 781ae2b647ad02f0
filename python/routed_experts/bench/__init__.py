"""Measuring experts calls: one implementation for ``routed-experts bench``, ``tune`` and benches/.

shapes.py      sizes of well-known layers, and what the best published kernel takes on them
inputs.py      weights, tokens and routing, drawn on the device; the float32 reference
recorded.py    routing that a model made, from a file
gate.py        an answer is compared before anything is timed
candidates.py  transformers' functions and our backends, as functions of one call
timing.py      medians of candidates that take turns: eager, compiled or as a CUDA graph
floor.py       what the device can do, measured, and the time that nothing can be under
measure.py     one layer: rows of errors, times and multiples
run.py         a whole grid of rows, written after every one
report.py      tables, and the setting of a run
crossings.py   where the fastest changes; ratios to an older run
picture.py     the same as PNG (matplotlib)
page.py        and as an HTML page that needs nothing else (plotly)
"""

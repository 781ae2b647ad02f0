"""The parts of bench_experts.py, one a file.

shapes.py      sizes of well-known layers, and what the best published kernel takes on them
inputs.py      weights, tokens and routing, drawn on the device; the float32 reference
gate.py        an answer is compared before anything is timed
candidates.py  transformers' functions and our backends, as functions of one call
timing.py      medians of candidates that take turns, eager or as a CUDA graph
floor.py       what the device can do, measured, and the time that nothing can be under
report.py      tables, and the setting of a run
"""

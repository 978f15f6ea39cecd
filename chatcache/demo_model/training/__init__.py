"""Make the demo model: generate dialogues, train on them, measure held-out questions.

Not part of the wheel. Read `corpus` (dialogues from the turns of `skills`, `facts`, `long_answers` and `personas`,
worded by `wording`), then `network`, `train` and `evaluate`.
"""

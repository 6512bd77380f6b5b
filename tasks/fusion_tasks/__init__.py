"""The tasks that flows are composed of: text, tokens, models, training, publishing, reports."""

"""The built-in task: a language model on text, from the seed or pretrained, all of it or LoRA.

It is a task like a user's own: processes, checkpoints and failures are no concern of it.
"""

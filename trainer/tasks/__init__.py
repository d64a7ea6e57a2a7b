"""The tasks that come with everstep."""

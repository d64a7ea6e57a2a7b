"""The operating system: processes, control groups, environment, files that are whole or absent.

It knows nothing of jobs and training, and of this project imports only the errors of settings.
"""

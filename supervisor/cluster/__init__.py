"""Acts on slots: places them, starts and ends their children, and owns the servers of a job.

It decides nothing and writes no journal. Ray is imported only here, and only once connected.
"""

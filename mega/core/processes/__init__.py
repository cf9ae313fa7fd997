"""The life of ranks: how they start, meet, answer for each other and end. What they compute is not known here.

world                    which rank of how many this process is, as launchers say
launch, pool, signals    local ranks for one job or for many, and signals that ask them to stop
restarts            a job that is started again after a failure that may pass
scripts, options         what starts a run on several hosts, for schedulers
hosts, leader, wire      the same on several hosts, with spares: a host's part, the leader's, and their connection
connect, rendezvous, interface   a rank's way into the group, where ranks meet, and by which network interface
roll_call, questions, position   which rank the others wait for: asked, put into the store, and answered
flight                   which exchange they stand in, by torch's flight recorder
exit_reports             why a rank failed, read once
"""

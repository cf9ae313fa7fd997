"""How ranks start, find each other, notice that one is lost, and end. What they compute is not known here.

world                    which rank of how many this process is, by its launcher's variables
launch, pool, signals    local ranks for one job or for many, and signals that ask them to stop
restarts                 a job that is started again after a failure that may pass
hosts, leader, wire      restarts on several hosts, where a spare takes a lost one's place: a host's part, the leader's,
                         and their connection
scripts, options         what starts a run on several hosts, for schedulers
connect, rendezvous, interface   a rank's way into the group, where ranks meet, and by which network interface
roll_call, questions, position   which rank the others wait for: asked, put into the store, and answered
flight                   which exchange they stand in, by torch's flight recorder
exit_reports             why a rank failed, and its exit code; the codes are in launch
"""

"""Starts ranks, connects them, detects lost ranks, and ends ranks. This package does not depend on the work that ranks
do.

world                    rank and world size of this process, from its launcher's variables
launch, pool, signals    local ranks for one job or for many, and signals that ask them to stop
code                     the version of the code of this process
restarts                 restarts of a job after a transient failure
hosts, leader, wire      restarts on several hosts, where a spare replaces a lost host: the code of each host, the code
                         of the leader, and their connection
scripts, options         scripts and manifests that start a run on several hosts, for schedulers
one_device               gloo groups that share one thread, for a pool
connect, rendezvous, interface   process groups, the store in which ranks find each other, and the network interface
roll_call, questions, position   finding the rank for which others wait (the watchdog, its messages, and the answers)
flight                   the collective in which ranks wait, read from torch's flight recorder
exit_reports             why a rank failed, and its exit code; the codes are in launch
"""

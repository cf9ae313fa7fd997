"""The loop: state, one step, and what falls due between steps. It knows no family.

state, wire, step, loop   what a run is at a moment, how a rank builds it, one update, and all of them
routing                   the load of experts in a step, and the bias that balances it
routines                  what is due between steps; evaluation and sampling are here
schedules                 rates of a run that resumes
judge, policy, probes     whether a step was sound, where it broke first, and what is done about it
stop, notice              requests to end early, and what one who asks is told

start     all that happens before the first step
kinds     what is trained on, by --task
saves     where a run saves, what it saves, and how it resumes from that
guards    whether a run can be trusted: finite numbers, equal copies, slow ranks
metrics   what the user is given of them: a file, a log, services that keep them
"""

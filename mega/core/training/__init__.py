"""The loop: state, one step, and what falls due between steps. It knows no family.

state, wire, step, loop   what a run is at a moment, how a rank builds it, one update, and all of them
routing                   how many tokens each expert got in a step, and the bias that balances them
routines                  what is due between steps; evaluation and sampling are here
schedules                 rates of a run that resumes
policy, judge, probes     the limit beyond which a loss is a spike; what follows from NaN or a spike; where NaN began
stop, notice              requests to end early, and what the user is told after a signal

start     what happens before the first step
kinds     what is trained on, by --task
saves     the run's directory and copies in memory, and how it resumes from them
guards    whether a run can be trusted: finite numbers, equal copies, slow ranks
metrics   what the user is told while it runs: a file, a log, a progress bar, services
"""

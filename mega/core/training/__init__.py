"""The training loop: state, one step, and the work between steps. It knows no family.

state, wire, step, loop   the state of a run, its construction on a rank, one update, and the loop over all updates
routing                   the number of tokens of each expert in a step, and the bias that balances them
routines                  the work between steps; evaluation, sampling
schedules                 learning rate and weight decay of a run that resumes
policy, judge, probes     limits of a spike; the reaction to NaN or a spike; the tensor in which a NaN appeared first
stop, notice              requests to end early, and messages to the user after a signal

start     the work before the first step
kinds     the data and losses of each --task
saves     the directory of the run, copies in memory, and resuming from them
guards    checks of a run: finite numbers, equal replicas, slow ranks
metrics   reports during a run: a file, a log, a progress bar, services
"""

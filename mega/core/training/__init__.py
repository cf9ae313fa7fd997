"""The training loop: state, one step, and the work between steps. The package does not depend on the model family.

state, wire, step, loop   the state of a run, its construction on a rank, one update, and the loop over all updates
routing                   the number of tokens per expert in a step, and the bias that balances these numbers
routines                  the work between steps; evaluation, sampling
schedules                 learning rate and weight decay, including those of a run that resumes
policy, judge, probes     limits above which a step is a spike; the reaction to a NaN or a spike; the tensor in which a
                          NaN appeared first
stop, notice              requests to end early, and messages to the user after a signal

start     the work before the first step
kinds     the data and losses of each value of --task
saves     the directory of the run, copies in memory, and resuming from them
guards    checks of a run: finite numbers, equal replicas, slow ranks
metrics   reports during a run: a file, a log, a progress bar, services
"""

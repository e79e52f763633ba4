# CLOSED: held out. Whoever changes how runs are compared or judged does not read this folder, nor the details of its results.

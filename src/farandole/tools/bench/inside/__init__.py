"""What runs in the processes that are measured, ours and the peers' alike. Started as `python -m inside.rank`.
Imports nothing of the package but itself: the interpreter may be one that has another Horovod and no Farandole."""

# `farandole check train.py`: runs a few steps of a script on several ranks and reports the mistakes that it sees.
# Touches nothing; __main__.py starts the job, rank.py is what runs in each rank, judge.py compares their reports.

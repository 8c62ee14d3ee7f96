"""The same jobs by perpend and by the tools people use today, side by side; `python benchmarks/run.py`.

    run.py                 the command: which cells, in which order; the file of results; the page
    peers/jobs/            one file a job: what is asked, and how each tool does it, or why it cannot
    peers/tools.py         how each tool loads the model, and what people write by hand
    peers/race.py          contenders in processes and environments of their own, taking turns
    peers/worker.py        the process of one contender
    peers/results.py       ratios of medians, memory, who is first
    peers/page.py          the same as Markdown, written into docs/benchmarks.md

A new job is one new file of jobs/; a new tool is a contender of the jobs it can do, and a line in tools.py if
it needs a package of its own. Nothing here imports perpend at the top: other tools' environments lack it.
"""

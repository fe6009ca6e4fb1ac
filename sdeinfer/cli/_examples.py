"""Examples to copy. A comment says what a command does, and what it writes; tests parse the commands."""

WELCOME = """\
Check how your network is initialised; infer the parameters of shaped
Transformers from hidden states, with error bars and a verdict.

\b
# See it work: sample 128 networks, fit and judge them. Half a minute.
# Writes calibration/: report.html, figures/, data.nc, posterior.nc, …
sdeinfer calibrate

\b
# Is the model of this config.json initialised as GPT-2 is? Half a minute.
# Writes audit/: audit.html, audit.json
sdeinfer audit config.json --recipe gpt2 --out audit

\b
# Fit hidden states of yours, (networks, layers, tokens, width). A minute.
# Writes data.nc, then calibration/ as above
sdeinfer observe --hidden-states states.npy --architecture transformer
sdeinfer calibrate --data data.nc
"""

EXAMPLES = {
    "calibrate": """\
# data of your own; writes mine/: report.html, figures/, posterior.nc, …
sdeinfer calibrate --data data.nc --architecture transformer --out mine""",
    "audit": """\
# a Hugging Face model; writes audit/: audit.html, audit.json
sdeinfer audit config.json --recipe gpt2 --out audit
# the model that the function `make` in model.py makes; writes nothing
sdeinfer audit model.py:make --recipe pytorch""",
    "tune": """\
# the largest γ at a stated risk; writes tuned/: report.html, tuned.json, …
sdeinfer tune --maximise gamma --fix tau0=1 --fix c_gap=1 --norm 1 \\
  --subject-to 'P(norm factor < 2) >= 0.95'""",
    "observe": """\
# hidden states of your own; writes data.nc
sdeinfer observe --hidden-states states.npy --architecture transformer
# sampled networks, every fourth layer; writes sampled.nc
sdeinfer observe --gamma 0.3 --observe-every 4 --out sampled.nc""",
    "fit": """\
# γ and c± where τ0 is known; writes posterior.nc, for `check` and `report`
sdeinfer fit data.nc --architecture transformer --fix tau0=1""",
    "check": "# parameters and verdict of what `fit` wrote; writes nothing\nsdeinfer check posterior.nc",
    "report": "# of what `fit` wrote; writes report/: report.html, …\nsdeinfer report posterior.nc --out report",
    "simulate": "# paths up to depth-time 0.25; writes paths.nc\nsdeinfer simulate --time 0.25 --gamma 0.3",
}

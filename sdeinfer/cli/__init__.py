"""The command line: observe → fit → check → report, in one command or in single steps through files."""

from sdeinfer.cli._app import Command, app
from sdeinfer.cli._audit import audit_command
from sdeinfer.cli._fits import Calibrate, calibrate_command, check_command, fit_command, report_command
from sdeinfer.cli._networks import observe_command, simulate_command
from sdeinfer.cli._studies import tune_command

app.command("calibrate", cls=Calibrate)(calibrate_command)
app.command("audit", cls=Command)(audit_command)
app.command("tune", cls=Command)(tune_command)
app.command("observe", cls=Command)(observe_command)
app.command("fit", cls=Command)(fit_command)
app.command("check", cls=Command)(check_command)
app.command("report", cls=Command)(report_command)
app.command("simulate", cls=Command)(simulate_command)

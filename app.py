"""CDK entry point: the stacks of one profile (`-c profile=NAME` or a path; p5 by default)."""

from aws_cdk import App

from stacks.application import build

app = App()
build(app)
app.synth()

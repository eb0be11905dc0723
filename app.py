"""CDK entry point: wires the stacks of one profile."""

from aws_cdk import App

app = App()
app.synth()

"""Code of the functions behind the custom resources: boto3 and the standard library, Python 3.13."""

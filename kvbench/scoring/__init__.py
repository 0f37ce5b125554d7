"""Score answers: graders, the processes that run them (`pool`), the sandbox and the judge.

Imports task records, sources (for the data with a judge's prompts) and console. Only a local judge needs torch.
"""

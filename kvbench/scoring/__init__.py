"""Score answers: graders, the processes that run them (`pool`), the sandbox and the judge.

Imports task records, sources (a judge's prompts are data) and console. Only a local judge needs torch.
"""

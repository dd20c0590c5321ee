"""`meshrl migrate`: scripts and configs of verl as commands for this package."""

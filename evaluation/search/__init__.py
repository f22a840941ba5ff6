"""How good are the search's plans beside those of other planners, and how fast is it at size?"""

"""Does the closed loop hold on emulated hosts: measure, fit, predict, train, compare?"""

"""The program that checks a host before a launch; its files run there without hetplan."""

"""How far are hetplan's predictions from steps and layers that other people measured?"""

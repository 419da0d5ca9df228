"""understudy.persistence"""

"""The text that the tiny models' tokenizer learns its merges from.

It is the wording of small reasoning tasks, so that their prompts and answers take few tokens. Changing a character here
changes the token ids of every ``tiny:`` model.
"""

from __future__ import annotations

CORPUS = """\
What is the sum of the two numbers? What is the difference between them? What is the product of the numbers?
What is one plus one? What is nine minus three? What is four times five? What is eight divided by two?
Answer: Yes. Answer: No. Answer: x. Answer: y. Answer: The answer is <answer>. Answer: the result is <answer>.
Answer: True. Answer: False. Answer: Give the final answer between <answer> and </answer>.
Question: Compute the value of the expression. Question: Find the value of x. Question: Solve the equation for x.
Write the answer inside <answer> </answer> tags. Put your final answer after ####. Think step by step, then answer.
<think> First we add the numbers. Then we subtract. Next we multiply, and last we divide. So the answer is </think>
<think> Let us check this step. We have the first number, then the second number, then the third number. </think>
<answer> </answer> <answer> </answer> <answer> </answer> <think> </think> <tool_call> </tool_call> <tool_response>
 + - * / = ( ) + - * / = ( ) + - * / = ( ) < > <= >= != == ** // % , . : ; ? ! $ # " '
 + ( - ( * ( / ( = ( ) + ) - ) * ) / ) = ) , ( ), ). (( )) [ ] { } [] {} () \\( \\) \\[ \\] \\boxed{ } \\frac{ }{ }
 \\times \\cdot
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million first second third half double
Using the numbers, make an equation that equals the target. You may use each number once, with +, -, * and /.
Use all of the numbers exactly once to reach the target. Show your work, then return the equation.
How many are left? How many are there in total? How much does each cost? How much money does she have now?
She has some apples and he gives her more. They buy boxes of pencils for dollars each. He sells half of them every day.
If there are so many in each box, how many boxes are there? After that they have less than before. All of them are here.
Calculate: add, subtract, multiply, divide, plus, minus, times, equals, sum, difference, product, quotient, remainder.
Sort the list of words in order. Reverse the string. Count the letters in the word. Is the statement true or false?
Return only the number. Return the answer as a number, with no other words. Do not explain. Yes. No. True. False.
You are a helpful assistant. You solve problems with care. The user asks a question and the assistant answers it.
You can call a tool with a name and arguments: {"name": "calculator", "arguments": {"expression": ""}} Result: Error:
Step: we know that x = y, so x + y = z. Then z - y = x. Therefore the value is the same. Hence the total is this number.
def solve(x, y): return x + y for i in range(n): if x == y: print(x) else: import math while not True
The number of people who were at the place in the morning was more than the number that came in the evening.
It takes her an hour to read the book; he reads it in minutes. Each week has days, each day has hours, each year months.
"""
